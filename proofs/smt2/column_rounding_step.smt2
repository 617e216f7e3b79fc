; column_rounding_step: If v = 2^-m y + e then v.k - 2^-m y.k = e.k (any dimension, by induction).
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const difference Real)
(declare-const e Real)
(declare-const k Real)
(declare-const scale Real)
(declare-const y Real)
(assert (not (= (- (+ difference (* (+ (* scale y) e) k)) (* scale (* y k))) (+ difference (* e k)))))
(check-sat)
