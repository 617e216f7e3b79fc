; row_check: A row that passes sum <= 2^ROW_MAGNITUDE_LOG2_MAX has no NaN, no Inf and no larger part in its sum.
; The negated claim: unsat means proved.
; ROW_MAGNITUDE_LOG2_MAX = 60
(set-logic QF_BVFP)
(declare-const columns (_ BitVec 64))
(declare-const heads (_ BitVec 64))
(declare-const slack (_ BitVec 64))
(assert (not (fp.lt ((_ to_fp 11 53) heads) ((_ to_fp 11 53) #b0000000000000000000000000000000000000000000000000000000000000000))))
(assert (not (fp.lt ((_ to_fp 11 53) columns) ((_ to_fp 11 53) #b0000000000000000000000000000000000000000000000000000000000000000))))
(assert (not (fp.lt ((_ to_fp 11 53) slack) ((_ to_fp 11 53) #b0000000000000000000000000000000000000000000000000000000000000000))))
(assert (fp.leq (fp.add RNE (fp.add RNE ((_ to_fp 11 53) heads) ((_ to_fp 11 53) columns)) ((_ to_fp 11 53) slack)) ((_ to_fp 11 53) #b0100001110110000000000000000000000000000000000000000000000000000)))
(assert (not (and (fp.leq ((_ to_fp 11 53) heads) ((_ to_fp 11 53) #b0100001110110000000000000000000000000000000000000000000000000000)) (fp.leq ((_ to_fp 11 53) columns) ((_ to_fp 11 53) #b0100001110110000000000000000000000000000000000000000000000000000)) (fp.leq ((_ to_fp 11 53) slack) ((_ to_fp 11 53) #b0100001110110000000000000000000000000000000000000000000000000000)))))
(check-sat)
