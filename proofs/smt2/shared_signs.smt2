; shared_signs: Vectors with a negative product at element i weigh at most max(P_i, N_i): a key has one sign there.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const element Real)
(declare-const harm Real)
(declare-const key Real)
(declare-const minus Real)
(declare-const plus Real)
(declare-const share Real)
(assert (>= share 0.0))
(assert (>= plus 0.0))
(assert (<= harm (ite (> key 0.0) plus (ite (< key 0.0) minus 0.0))))
(assert (not (and (<= (+ harm (ite (< (* element key) 0.0) share 0.0)) (ite (> key 0.0) (+ plus (ite (< element 0.0) share 0.0)) (ite (< key 0.0) (+ minus (ite (> element 0.0) share 0.0)) 0.0))) (<= (+ harm (ite (< (* element key) 0.0) share 0.0)) (ite (>= (+ plus (ite (< element 0.0) share 0.0)) (+ minus (ite (> element 0.0) share 0.0))) (+ plus (ite (< element 0.0) share 0.0)) (+ minus (ite (> element 0.0) share 0.0)))))))
(check-sat)
