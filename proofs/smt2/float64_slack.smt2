; float64_slack: The float64 roundings of the query side stay within 2^FLOAT64_SLACK_LOG2 of the absolute sum.
; The negated claim: unsat means proved.
; FLOAT64_SLACK_LOG2 = -40
(set-logic QF_LRA)
(declare-const count Real)
(declare-const growth Real)
(assert (<= count 4737.0))
(assert (<= growth (+ 1.0 (* (/ 1025.0 9223372036854775808.0) count))))
(assert (not (and (<= (+ growth (* (/ 1.0 9007199254740992.0) growth)) (+ 1.0 (* (/ 1025.0 9223372036854775808.0) (+ count 1.0)))) (<= (- growth 1.0) (/ 1.0 1099511627776.0)))))
(check-sat)
