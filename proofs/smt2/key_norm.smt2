; key_norm: The float32 norm of a key, times 1 + 2^NORM_OUTWARD_LOG2, is at least ||k~||.
; The negated claim: unsat means proved.
; FLOAT32_UNIT = 1/16777216
; HEAD_DIM = 128
; NORM_OUTWARD_LOG2 = -16
(set-logic QF_NRA)
(declare-const norm Real)
(declare-const root Real)
(declare-const squares Real)
(declare-const total Real)
(assert (>= root 0.0))
(assert (>= total (* (/ 131071.0 131072.0) squares)))
(assert (>= (* root root) (* (/ 281474943156225.0 281474976710656.0) total)))
(assert (>= norm (* (/ 1099528339455.0 1099511627776.0) root)))
(assert (not (>= (* norm norm) squares)))
(check-sat)
