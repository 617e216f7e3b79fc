; several_aggregates: If sum_j lambda_j <= |w| then -|w| relu(x) <= -sum_j lambda_j relu(x): any number of aggregates.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const covered Real)
(declare-const magnitude Real)
(declare-const multiplier Real)
(declare-const spent Real)
(declare-const x Real)
(assert (<= covered (* spent (ite (> x 0.0) x 0.0))))
(assert (<= (+ spent multiplier) magnitude))
(assert (not (and (<= (+ covered (* multiplier (ite (> x 0.0) x 0.0))) (* (+ spent multiplier) (ite (> x 0.0) x 0.0))) (<= (- (* magnitude (ite (> x 0.0) x 0.0))) (- (+ covered (* multiplier (ite (> x 0.0) x 0.0))))))))
(check-sat)
