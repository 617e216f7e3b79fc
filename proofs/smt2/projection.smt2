; projection: If x = sum a_j x_j + r with a_j >= 0 then relu(x) <= sum a_j relu(x_j) + relu(r).
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const a Real)
(declare-const bound Real)
(declare-const column Real)
(declare-const x Real)
(assert (<= (ite (> x 0.0) x 0.0) bound))
(assert (>= a 0.0))
(assert (not (<= (ite (> (+ x (* a column)) 0.0) (+ x (* a column)) 0.0) (+ bound (* a (ite (> column 0.0) column 0.0))))))
(check-sat)
