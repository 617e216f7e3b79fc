; nan_survives: A bound that is NaN or +Inf, or a threshold that is NaN or -Inf, never skips a key (U < tau skips).
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const bound (_ BitVec 32))
(declare-const tau (_ BitVec 32))
(assert (or (fp.isNaN ((_ to_fp 8 24) bound)) (fp.isNaN ((_ to_fp 8 24) tau)) (fp.eq ((_ to_fp 8 24) bound) ((_ to_fp 8 24) #b01111111100000000000000000000000)) (fp.eq ((_ to_fp 8 24) tau) ((_ to_fp 8 24) #b11111111100000000000000000000000))))
(assert (not (not (fp.lt ((_ to_fp 8 24) bound) ((_ to_fp 8 24) tau)))))
(check-sat)
