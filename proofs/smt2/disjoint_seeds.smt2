; disjoint_seeds: Hints and older keys that lie before the newest keys are none of these.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const end Int)
(declare-const hint Int)
(declare-const near Int)
(declare-const place Int)
(assert (< place near))
(assert (< hint (- end near)))
(assert (not (< hint (- (- end 1) place))))
(check-sat)
