; survivor_bits: Adding 2^i to a word whose bit i is clear sets that bit and no other; shift and mask read it back.
; The negated claim: unsat means proved.
(set-logic QF_BV)
(declare-const i (_ BitVec 32))
(declare-const j (_ BitVec 32))
(declare-const word (_ BitVec 32))
(assert (bvult j #b00000000000000000000000000100000))
(assert (= (bvand (bvlshr word i) #b00000000000000000000000000000001) #b00000000000000000000000000000000))
(assert (not (= (bvand (bvlshr (bvadd word (bvshl #b00000000000000000000000000000001 i)) j) #b00000000000000000000000000000001) (ite (= i j) #b00000000000000000000000000000001 (bvand (bvlshr word j) #b00000000000000000000000000000001)))))
(check-sat)
