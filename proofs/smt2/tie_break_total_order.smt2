; tie_break_total_order: (score descending, index ascending) is a strict total order, with -0 equal to +0 and no NaN.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const index_a (_ BitVec 32))
(declare-const index_b (_ BitVec 32))
(declare-const index_c (_ BitVec 32))
(declare-const score_a (_ BitVec 32))
(declare-const score_b (_ BitVec 32))
(declare-const score_c (_ BitVec 32))
(assert (not (fp.isNaN ((_ to_fp 8 24) score_a))))
(assert (not (fp.isNaN ((_ to_fp 8 24) score_b))))
(assert (not (= index_a index_b)))
(assert (not (and (= (or (fp.lt ((_ to_fp 8 24) score_b) ((_ to_fp 8 24) score_a)) (and (fp.eq ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_b)) (bvult index_a index_b))) (not (or (fp.lt ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_b)) (and (fp.eq ((_ to_fp 8 24) score_b) ((_ to_fp 8 24) score_a)) (bvult index_b index_a))))) (not (or (fp.lt ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_a)) (and (fp.eq ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_a)) (bvult index_a index_a)))) (=> (and (or (fp.lt ((_ to_fp 8 24) score_b) ((_ to_fp 8 24) score_a)) (and (fp.eq ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_b)) (bvult index_a index_b))) (or (fp.lt ((_ to_fp 8 24) score_c) ((_ to_fp 8 24) score_b)) (and (fp.eq ((_ to_fp 8 24) score_b) ((_ to_fp 8 24) score_c)) (bvult index_b index_c)))) (or (fp.lt ((_ to_fp 8 24) score_c) ((_ to_fp 8 24) score_a)) (and (fp.eq ((_ to_fp 8 24) score_a) ((_ to_fp 8 24) score_c)) (bvult index_a index_c)))))))
(check-sat)
