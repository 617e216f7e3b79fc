; dot_error_total: Over the four steps the errors add up to D(q) n.
; The negated claim: unsat means proved.
; FRACTION_BITS = 13
; STEPS = 4
; STEP_TERMS = 32
; FIRST_STEP_LOSSY = 31
; STEP_LOSSY = 32
(set-logic QF_LRA)
(declare-const error_0 Real)
(declare-const error_1 Real)
(declare-const error_2 Real)
(declare-const error_3 Real)
(declare-const loss_0 Real)
(declare-const loss_1 Real)
(declare-const loss_2 Real)
(declare-const loss_3 Real)
(declare-const output_0 Real)
(declare-const output_1 Real)
(declare-const output_2 Real)
(declare-const output_3 Real)
(assert (<= error_0 (+ 0.0 (* (/ 1.0 8192.0) (+ (* 31.0 loss_0) output_0)))))
(assert (<= error_1 (+ error_0 (* (/ 1.0 8192.0) (+ (* 32.0 loss_1) output_1)))))
(assert (<= error_2 (+ error_1 (* (/ 1.0 8192.0) (+ (* 32.0 loss_2) output_2)))))
(assert (<= error_3 (+ error_2 (* (/ 1.0 8192.0) (+ (* 32.0 loss_3) output_3)))))
(assert (not (<= error_3 (* (/ 1.0 8192.0) (+ (* 31.0 loss_0) output_0 (* 32.0 loss_1) output_1 (* 32.0 loss_2) output_2 (* 32.0 loss_3) output_3)))))
(check-sat)
