; overflow_rescan: Whether a chunk's list fits or the chunk is rescanned, a winner is merged once and no key twice.
; The negated claim: unsat means proved.
(set-logic QF_LIA)
(declare-const emitted Bool)
(declare-const overflow Bool)
(declare-const scanned Bool)
(declare-const survives Bool)
(declare-const winner Bool)
(assert (=> winner (and survives emitted)))
(assert (=> (not overflow) (not scanned)))
(assert (=> overflow scanned))
(assert (not (and (<= (+ (ite (and survives emitted (not overflow)) 1 0) (ite scanned 1 0)) 1) (=> winner (= (+ (ite (and survives emitted (not overflow)) 1 0) (ite scanned 1 0)) 1)))))
(check-sat)
