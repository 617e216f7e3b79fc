; directed_rounding: Cutting towards zero, or stepping up, changes a magnitude by less than one unit of its last bit.
; The negated claim: unsat means proved.
(set-logic QF_BV)
(declare-const drop (_ BitVec 48))
(declare-const value (_ BitVec 48))
(assert (bvule drop #b000000000000000000000000000000000000000000011000))
(assert (bvult value (bvshl #b000000000000000000000000000000000000000000000001 #b000000000000000000000000000000000000000000101111)))
(assert (not (and (bvule (bvshl (bvlshr value drop) drop) value) (bvule value (ite (= (bvshl (bvlshr value drop) drop) value) (bvshl (bvlshr value drop) drop) (bvadd (bvshl (bvlshr value drop) drop) (bvshl #b000000000000000000000000000000000000000000000001 drop)))) (bvult (bvshl (bvsub value (bvshl (bvlshr value drop) drop)) #b000000000000000000000000000000000000000000000000) (bvshl #b000000000000000000000000000000000000000000000001 drop)) (bvult (bvshl (bvsub (ite (= (bvshl (bvlshr value drop) drop) value) (bvshl (bvlshr value drop) drop) (bvadd (bvshl (bvlshr value drop) drop) (bvshl #b000000000000000000000000000000000000000000000001 drop))) value) #b000000000000000000000000000000000000000000000000) (bvshl #b000000000000000000000000000000000000000000000001 drop)) (= (bvshl (bvlshr (ite (= (bvshl (bvlshr value drop) drop) value) (bvshl (bvlshr value drop) drop) (bvadd (bvshl (bvlshr value drop) drop) (bvshl #b000000000000000000000000000000000000000000000001 drop))) drop) drop) (ite (= (bvshl (bvlshr value drop) drop) value) (bvshl (bvlshr value drop) drop) (bvadd (bvshl (bvlshr value drop) drop) (bvshl #b000000000000000000000000000000000000000000000001 drop)))))))
(check-sat)
