; decode_threshold: With K recent keys that reach tau, or without a threshold, every member of the top K is written.
; The negated claim: unsat means proved.
(set-logic QF_LIRA)
(declare-const before Int)
(declare-const reach Int)
(declare-const score Real)
(declare-const tau Real)
(declare-const thresholded Bool)
(declare-const topk Int)
(assert (< before topk))
(assert (=> thresholded (>= reach topk)))
(assert (=> (< score tau) (>= before reach)))
(assert (not (or (not thresholded) (>= score tau))))
(check-sat)
