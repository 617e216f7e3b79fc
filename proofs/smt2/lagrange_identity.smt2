; lagrange_identity: (x^2 + a^2)(y^2 + b^2) = (xy + ab)^2 + (xb - ay)^2, hence (xy + ab)^2 <= (x^2 + a^2)(y^2 + b^2).
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const a Real)
(declare-const b Real)
(declare-const x Real)
(declare-const y Real)
(assert (not (and (= (* (+ (* x x) (* a a)) (+ (* y y) (* b b))) (+ (* (+ (* x y) (* a b)) (+ (* x y) (* a b))) (* 1.0 (* (- (* x b) (* a y)) (- (* x b) (* a y)))))) (<= (* (+ (* x y) (* a b)) (+ (* x y) (* a b))) (* (+ (* x x) (* a a)) (+ (* y y) (* b b)))))))
(check-sat)
