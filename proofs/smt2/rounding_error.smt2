; rounding_error: A float32 result nearest to x differs from it by at most u |x| + 2^-150, overflow aside.
; The negated claim: unsat means proved.
; FLOAT32_UNIT = 1/16777216
(set-logic QF_LRA)
(declare-const exact Real)
(declare-const power Real)
(declare-const rounded Real)
(declare-const spacing Real)
(assert (or (= spacing (* (/ 1.0 8388608.0) power)) (= spacing (/ 1.0 713623846352979940529142984724747568191373312.0))))
(assert (or (<= power (ite (>= exact 0.0) exact (- exact))) (= spacing (/ 1.0 713623846352979940529142984724747568191373312.0))))
(assert (<= (* 2.0 (ite (>= (- rounded exact) 0.0) (- rounded exact) (- (- rounded exact)))) spacing))
(assert (not (<= (ite (>= (- rounded exact) 0.0) (- rounded exact) (- (- rounded exact))) (+ (* (/ 1.0 16777216.0) (ite (>= exact 0.0) exact (- exact))) (/ 1.0 1427247692705959881058285969449495136382746624.0)))))
(check-sat)
