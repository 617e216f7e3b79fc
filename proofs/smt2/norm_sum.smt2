; norm_sum: (sum of n norms)^2 <= n times the sum of their squares (induction over vectors).
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const count Real)
(declare-const norms Real)
(declare-const own Real)
(declare-const squares Real)
(assert (>= count 1.0))
(assert (<= (* norms norms) (* count squares)))
(assert (not (<= (* (+ norms own) (+ norms own)) (* (+ count 1.0) (+ squares (* own own))))))
(check-sat)
