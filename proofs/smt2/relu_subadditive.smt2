; relu_subadditive: relu(a + b) <= relu(a) + relu(b).
; The negated claim: unsat means proved.
(set-logic QF_LRA)
(declare-const a Real)
(declare-const b Real)
(assert (not (<= (ite (> (+ a b) 0.0) (+ a b) 0.0) (+ (ite (> a 0.0) a 0.0) (* 1.0 (ite (> b 0.0) b 0.0))))))
(check-sat)
