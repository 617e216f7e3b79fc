; scale_monotone: For a key scale s > 0: B >= b gives s B >= s b.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const bound Real)
(declare-const scale Real)
(declare-const value Real)
(assert (> scale 0.0))
(assert (>= bound value))
(assert (not (>= (* scale bound) (* scale value))))
(check-sat)
