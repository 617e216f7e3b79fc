; no_overflow: Under the premises on key scale and row magnitude no partial sum reaches 2^127.
; The negated claim: unsat means proved.
; HEAD_DIM = 128
; E4M3_MAX = 448
; KEY_SCALE_LOG2_MAX = 40
; ROW_MAGNITUDE_LOG2_MAX = 60
(set-logic QF_NRA)
(declare-const magnitude Real)
(declare-const n Real)
(declare-const partial Real)
(declare-const scale Real)
(assert (<= scale 1099511627776.0))
(assert (>= n 0.0))
(assert (<= (* n n) 51380224.0))
(assert (<= magnitude 1152921504606846976.0))
(assert (<= (ite (>= partial 0.0) partial (- partial)) (* (* 2.0 magnitude) n)))
(assert (not (and (< (ite (>= partial 0.0) partial (- partial)) 170141183460469231731687303715884105728.0) (< (* scale (ite (>= partial 0.0) partial (- partial))) 170141183460469231731687303715884105728.0))))
(check-sat)
