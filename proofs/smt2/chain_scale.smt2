; chain_scale: Multiplying by a key scale s > 0 is one more rounding of the chain: s times its error, times 1 + u.
; The negated claim: unsat means proved.
; FLOAT32_UNIT = 1/16777216
(set-logic QF_NRA)
(declare-const computed Real)
(declare-const exact Real)
(declare-const grown Real)
(declare-const magnitude Real)
(declare-const result Real)
(declare-const scale Real)
(declare-const under Real)
(assert (<= (ite (>= exact 0.0) exact (- exact)) magnitude))
(assert (<= (ite (>= (- computed exact) 0.0) (- computed exact) (- (- computed exact))) (+ (- grown magnitude) under)))
(assert (> scale 0.0))
(assert (<= (ite (>= (- result (* scale computed)) 0.0) (- result (* scale computed)) (- (- result (* scale computed)))) (+ (* (/ 1.0 16777216.0) (ite (>= (* scale computed) 0.0) (* scale computed) (- (* scale computed)))) (/ 1.0 1427247692705959881058285969449495136382746624.0))))
(assert (not (<= (ite (>= (- result (* scale exact)) 0.0) (- result (* scale exact)) (- (- result (* scale exact)))) (+ (- (* (/ 16777217.0 16777216.0) (* scale (+ grown under))) (* scale magnitude)) (/ 1.0 1427247692705959881058285969449495136382746624.0)))))
(check-sat)
