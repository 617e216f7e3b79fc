; dot_error: One step adds at most 2^-13 (32 max(|q~_t|_inf, ||q_<t||) + ||q_<=t||) n to the error of the dot.
; The negated claim: unsat means proved.
; FRACTION_BITS = 13
; STEP_TERMS = 32
; STEP_LOSSY = 32
(set-logic QF_NRA)
(declare-const accumulator Real)
(declare-const block Real)
(declare-const error Real)
(declare-const exact Real)
(declare-const following Real)
(declare-const key_max Real)
(declare-const n Real)
(declare-const output_power Real)
(declare-const prefix Real)
(declare-const prefix_next Real)
(declare-const products Real)
(declare-const step_power Real)
(assert (>= block 0.0))
(assert (>= n 0.0))
(assert (<= key_max n))
(assert (<= (ite (>= accumulator 0.0) accumulator (- accumulator)) (* prefix n)))
(assert (<= step_power (ite (>= (* block key_max) (ite (>= accumulator 0.0) accumulator (- accumulator))) (* block key_max) (ite (>= accumulator 0.0) accumulator (- accumulator)))))
(assert (<= output_power (* prefix_next n)))
(assert (<= (ite (>= (- following (+ accumulator products)) 0.0) (- following (+ accumulator products)) (- (- following (+ accumulator products)))) (+ (* (/ 1.0 256.0) step_power) (* (/ 1.0 8192.0) output_power))))
(assert (<= (ite (>= (- accumulator exact) 0.0) (- accumulator exact) (- (- accumulator exact))) (* error n)))
(assert (not (<= (ite (>= (- following (+ exact products)) 0.0) (- following (+ exact products)) (- (- following (+ exact products)))) (* (+ (+ error (* (/ 1.0 256.0) (ite (>= block prefix) block prefix))) (* (/ 1.0 8192.0) prefix_next)) n))))
(check-sat)
