; shard_indices: Adding each shard's first key keeps the order of keys within a shard and between shards.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const base Int)
(declare-const next_base Int)
(declare-const size Int)
(declare-const x Int)
(declare-const y Int)
(declare-const z Int)
(assert (< x size))
(assert (>= y 0))
(assert (>= next_base (+ base size)))
(assert (not (and (< (+ base x) (+ next_base y)) (= (< x z) (< (+ base x) (+ base z))))))
(check-sat)
