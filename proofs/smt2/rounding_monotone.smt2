; rounding_monotone: x <= y gives float32(x) <= float32(y): to nearest, towards zero and upward, from float64.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const x (_ BitVec 64))
(declare-const y (_ BitVec 64))
(assert (fp.leq ((_ to_fp 11 53) x) ((_ to_fp 11 53) y)))
(assert (not (and (fp.leq ((_ to_fp 8 24) RNE ((_ to_fp 11 53) x)) ((_ to_fp 8 24) RNE ((_ to_fp 11 53) y))) (fp.leq ((_ to_fp 8 24) RTZ ((_ to_fp 11 53) x)) ((_ to_fp 8 24) RTZ ((_ to_fp 11 53) y))) (fp.leq ((_ to_fp 8 24) RTP ((_ to_fp 11 53) x)) ((_ to_fp 8 24) RTP ((_ to_fp 11 53) y))))))
(check-sat)
