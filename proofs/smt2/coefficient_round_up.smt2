; coefficient_round_up: A coefficient rounded up never lowers its term, because the activation is >= 0.
; The negated claim: unsat means proved.
(set-logic QF_NRA)
(declare-const activation Real)
(declare-const coefficient Real)
(declare-const share Real)
(declare-const weight Real)
(assert (>= activation 0.0))
(assert (>= coefficient (+ weight share)))
(assert (not (>= (* coefficient activation) (+ (* weight activation) (* share activation)))))
(check-sat)
