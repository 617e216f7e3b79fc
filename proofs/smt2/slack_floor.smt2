; slack_floor: Twice all that underflow can cost in score and bound is at most 2^SLACK_FLOOR_LOG2 n s.
; The negated claim: unsat means proved.
; SLACK_FLOOR_LOG2 = -70
; KEY_SCALE_LOG2_MIN = -40
; MAX_COLUMNS = 64
; E4M3_MIN_NORMAL = 1/64
(set-logic QF_NRA)
(declare-const n Real)
(declare-const scale Real)
(assert (>= n (/ 1.0 64.0)))
(assert (>= scale (/ 1.0 1099511627776.0)))
(assert (not (<= (* 2.0 (* (/ 1.0 713623846352979940529142984724747568191373312.0) (+ (* 129.0 scale) 5.0))) (* (* (/ 1.0 1180591620717411303424.0) n) scale))))
(check-sat)
