; running_threshold: The larger of two valid thresholds is valid, and skips whatever the smaller one skips.
; The negated claim: unsat means proved.
(set-logic QF_LRA)
(declare-const bound Real)
(declare-const kth Real)
(declare-const running Real)
(declare-const tau Real)
(assert (<= tau kth))
(assert (<= running kth))
(assert (not (and (<= (ite (>= tau running) tau running) kth) (=> (< bound tau) (< bound (ite (>= tau running) tau running))))))
(check-sat)
