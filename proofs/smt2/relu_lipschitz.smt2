; relu_lipschitz: If |d - x| <= e then |relu(d) - relu(x)| <= e.
; The negated claim: unsat means proved.
(set-logic QF_LRA)
(declare-const computed Real)
(declare-const error Real)
(declare-const exact Real)
(assert (<= (- computed exact) error))
(assert (<= (- exact computed) error))
(assert (not (and (<= (* 1.0 (ite (> computed 0.0) computed 0.0)) (+ (* 1.0 (ite (> exact 0.0) exact 0.0)) error)) (<= (* 1.0 (ite (> exact 0.0) exact 0.0)) (+ (* 1.0 (ite (> computed 0.0) computed 0.0)) error)))))
(check-sat)
