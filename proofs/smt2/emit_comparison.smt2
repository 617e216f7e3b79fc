; emit_comparison: score >= tau holds exactly for the scores that are not NaN and not below tau.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const score (_ BitVec 32))
(declare-const tau (_ BitVec 32))
(assert (not (fp.isNaN ((_ to_fp 8 24) tau))))
(assert (not (= (fp.leq ((_ to_fp 8 24) tau) ((_ to_fp 8 24) score)) (and (not (fp.isNaN ((_ to_fp 8 24) score))) (not (fp.lt ((_ to_fp 8 24) score) ((_ to_fp 8 24) tau)))))))
(check-sat)
