; relu_homogeneous: relu(a x) = a relu(x) for a >= 0.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const a Real)
(declare-const x Real)
(assert (>= a 0.0))
(assert (not (= (ite (> (* a x) 0.0) (* a x) 0.0) (* a (ite (> x 0.0) x 0.0)))))
(check-sat)
