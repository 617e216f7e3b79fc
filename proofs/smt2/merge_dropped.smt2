; merge_dropped: A key outside the top K of its part is outside the top K of the union.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const ahead Bool)
(declare-const in_all Int)
(declare-const in_part Int)
(declare-const same_part Bool)
(declare-const topk Int)
(assert (<= in_part in_all))
(assert (not (and (<= (+ in_part (ite (and same_part ahead) 1 0)) (+ in_all (ite ahead 1 0))) (=> (>= in_part (- topk 0)) (>= in_all topk)))))
(check-sat)
