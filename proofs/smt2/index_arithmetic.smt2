; index_arithmetic: row * stride + column fits int64 for up to 2^31 rows, keys and strides.
; The negated claim: unsat means proved.
(set-logic QF_NIA)
(declare-const column Int)
(declare-const row Int)
(declare-const stride Int)
(assert (>= row 0))
(assert (< row 2147483648))
(assert (>= stride 0))
(assert (<= stride 2147483648))
(assert (>= column 0))
(assert (< column 2147483648))
(assert (not (and (< (+ (* row stride) column) 9223372036854775808) (>= (+ (* row stride) column) 0))))
(check-sat)
