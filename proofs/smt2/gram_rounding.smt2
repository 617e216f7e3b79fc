; gram_rounding: The residual's root of summed inner products, computed in float64, is within 2^FLOAT64_SLACK_LOG2.
; The negated claim: unsat means proved.
; HEAD_DIM = 128
; FLOAT64_SLACK_LOG2 = -40
(set-logic QF_NRA)
(declare-const computed Real)
(declare-const cover Real)
(declare-const norms Real)
(declare-const rho Real)
(declare-const root Real)
(declare-const squares Real)
(assert (>= root 0.0))
(assert (<= (* norms norms) (* 65.0 squares)))
(assert (>= computed (- (- cover (* (/ 1025.0 72057594037927936.0) (* norms norms))) (* (/ 4330625.0 9223372036854775808.0) cover))))
(assert (>= (* root root) (* (/ 2305843009213692927.0 2305843009213693952.0) computed)))
(assert (<= (* rho rho) cover))
(assert (<= squares cover))
(assert (not (<= rho (+ root (* (/ 1.0 1099511627776.0) root)))))
(check-sat)
