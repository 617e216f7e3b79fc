; radix_select: The largest digit that still reaches the wanted count keeps the K-th largest code in the prefix.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const above Int)
(declare-const at_least Int)
(declare-const greater Int)
(declare-const topk Int)
(declare-const wanted Int)
(assert (= (+ greater wanted) topk))
(assert (>= at_least wanted))
(assert (< above wanted))
(assert (not (and (= (+ (+ greater above) (- wanted above)) topk) (>= (- wanted above) 1) (<= (- wanted above) (- at_least above)))))
(check-sat)
