; linear_negative: For any w_h <= 0 and 0 <= lambda_h <= |w_h|: sum w_h relu(x_h) <= -sum lambda_h x_h.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const multiplier Real)
(declare-const signed Real)
(declare-const w Real)
(declare-const x Real)
(declare-const y Real)
(assert (<= signed (- y)))
(assert (<= w 0.0))
(assert (>= multiplier 0.0))
(assert (<= multiplier (ite (>= w 0.0) w (- w))))
(assert (not (<= (+ signed (* w (ite (> x 0.0) x 0.0))) (- (+ y (* multiplier x))))))
(check-sat)
