; zero_key: For a zero key, whose dots, norm and score are 0, a finite row computes U = 0.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const norm (_ BitVec 32))
(declare-const scale (_ BitVec 32))
(declare-const slack (_ BitVec 32))
(declare-const total (_ BitVec 32))
(assert (fp.eq ((_ to_fp 8 24) total) ((_ to_fp 8 24) #b00000000000000000000000000000000)))
(assert (not (or (fp.isNaN ((_ to_fp 8 24) scale)) (fp.isInfinite ((_ to_fp 8 24) scale)))))
(assert (not (or (fp.isNaN ((_ to_fp 8 24) slack)) (fp.isInfinite ((_ to_fp 8 24) slack)))))
(assert (fp.eq ((_ to_fp 8 24) norm) ((_ to_fp 8 24) #b00000000000000000000000000000000)))
(assert (not (and (fp.eq (fp.mul RNE (fp.fma RNE ((_ to_fp 8 24) slack) ((_ to_fp 8 24) norm) ((_ to_fp 8 24) total)) ((_ to_fp 8 24) scale)) ((_ to_fp 8 24) #b00000000000000000000000000000000)) (fp.eq (fp.mul RNE (fp.add RNE ((_ to_fp 8 24) total) (fp.mul RNE ((_ to_fp 8 24) slack) ((_ to_fp 8 24) norm))) ((_ to_fp 8 24) scale)) ((_ to_fp 8 24) #b00000000000000000000000000000000)))))
(check-sat)
