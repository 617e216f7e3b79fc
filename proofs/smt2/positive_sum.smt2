; positive_sum: A float32 sum of n + 1 squares, in any order, is at least 1 - n u of the real one (induction).
; The negated claim: unsat means proved.
; FLOAT32_UNIT = 1/16777216
(set-logic QF_LRA)
(declare-const computed_1 Real)
(declare-const computed_2 Real)
(declare-const count Real)
(declare-const result Real)
(declare-const share Real)
(declare-const shared_1 Real)
(declare-const shared_2 Real)
(assert (>= computed_1 shared_1))
(assert (>= computed_2 shared_2))
(assert (>= result (* (/ 16777215.0 16777216.0) (+ computed_1 computed_2))))
(assert (>= count 0.0))
(assert (>= share (- 1.0 (* (/ 1.0 16777216.0) count))))
(assert (not (and (>= result (* (/ 16777215.0 16777216.0) (+ shared_1 shared_2))) (>= (* (/ 16777215.0 16777216.0) share) (- 1.0 (* (/ 1.0 16777216.0) (+ count 1.0)))))))
(check-sat)
