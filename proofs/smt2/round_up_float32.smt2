; round_up_float32: Converting to nearest and stepping up where the result fell below is the upward rounding.
; The negated claim: unsat means proved.
(set-logic QF_BVFP)
(declare-const nearest (_ BitVec 32))
(declare-const x (_ BitVec 64))
(assert (not (fp.isNaN ((_ to_fp 11 53) x))))
(assert (= ((_ to_fp 8 24) nearest) ((_ to_fp 8 24) RNE ((_ to_fp 11 53) x))))
(assert (not (and (fp.leq ((_ to_fp 11 53) x) ((_ to_fp 11 53) RNE ((_ to_fp 8 24) (ite (fp.lt ((_ to_fp 11 53) RNE ((_ to_fp 8 24) nearest)) ((_ to_fp 11 53) x)) (ite (= (bvand nearest #b01111111111111111111111111111111) #b00000000000000000000000000000000) #b00000000000000000000000000000001 (ite (= ((_ extract 31 31) nearest) #b1) (bvsub nearest #b00000000000000000000000000000001) (bvadd nearest #b00000000000000000000000000000001))) nearest)))) (fp.eq ((_ to_fp 8 24) (ite (fp.lt ((_ to_fp 11 53) RNE ((_ to_fp 8 24) nearest)) ((_ to_fp 11 53) x)) (ite (= (bvand nearest #b01111111111111111111111111111111) #b00000000000000000000000000000000) #b00000000000000000000000000000001 (ite (= ((_ extract 31 31) nearest) #b1) (bvsub nearest #b00000000000000000000000000000001) (bvadd nearest #b00000000000000000000000000000001))) nearest)) ((_ to_fp 8 24) RTP ((_ to_fp 11 53) x))))))
(check-sat)
