; unusable_key_survives: With norm +Inf, scale 1 and G >= 0 (or NaN) a key survives, whatever its dots are.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const slack (_ BitVec 32))
(declare-const tau (_ BitVec 32))
(declare-const total (_ BitVec 32))
(assert (not (fp.lt ((_ to_fp 8 24) slack) ((_ to_fp 8 24) #b00000000000000000000000000000000))))
(assert (not (not (or (fp.lt (fp.mul RNE ((_ to_fp 8 24) #b00111111100000000000000000000000) (fp.fma RNE ((_ to_fp 8 24) slack) ((_ to_fp 8 24) #b01111111100000000000000000000000) ((_ to_fp 8 24) total))) ((_ to_fp 8 24) tau)) (fp.lt (fp.mul RNE ((_ to_fp 8 24) #b00111111100000000000000000000000) (fp.add RNE ((_ to_fp 8 24) total) (fp.mul RNE ((_ to_fp 8 24) slack) ((_ to_fp 8 24) #b01111111100000000000000000000000)))) ((_ to_fp 8 24) tau))))))
(check-sat)
