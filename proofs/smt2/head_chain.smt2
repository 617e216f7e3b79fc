; head_chain: The 12 roundings of the head combination stay within HEAD_CHAIN_ULPS = 16 units.
; The negated claim: unsat means proved.
; FLOAT32_UNIT = 1/16777216
; HEAD_CHAIN_ULPS = 16
(set-logic QF_LRA)
(declare-const growth Real)
(assert (= growth (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) (* (/ 16777217.0 16777216.0) 1.0))))))))))))))
(assert (not (<= (- growth 1.0) (/ 1.0 1048576.0))))
(check-sat)
