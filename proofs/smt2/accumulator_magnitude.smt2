; accumulator_magnitude: The accumulator never exceeds the sum of the products' magnitudes (induction over addends).
; The negated claim: unsat means proved.
(set-logic QF_LRA)
(declare-const bound Real)
(declare-const cut Real)
(declare-const product Real)
(declare-const result Real)
(declare-const sum Real)
(assert (<= (ite (>= sum 0.0) sum (- sum)) bound))
(assert (<= (ite (>= cut 0.0) cut (- cut)) (ite (>= product 0.0) product (- product))))
(assert (<= (ite (>= result 0.0) result (- result)) (ite (>= (+ sum cut) 0.0) (+ sum cut) (- (+ sum cut)))))
(assert (not (and (<= (ite (>= (+ sum cut) 0.0) (+ sum cut) (- (+ sum cut))) (+ bound (ite (>= product 0.0) product (- product)))) (<= (ite (>= result 0.0) result (- result)) (+ bound (ite (>= product 0.0) product (- product)))))))
(check-sat)
