; row_products: row * heads + lane of a block of at most 2^20 rows fits int32.
; The negated claim: unsat means proved.
(set-logic QF_BV)
(declare-const heads (_ BitVec 64))
(declare-const lane (_ BitVec 64))
(declare-const row (_ BitVec 64))
(assert (bvult row #b0000000000000000000000000000000000000000000100000000000000000000))
(assert (bvule heads #b0000000000000000000000000000000000000000000000000000000001000000))
(assert (bvult lane #b0000000000000000000000000000000000000000000000000000000010000000))
(assert (not (bvult (bvadd (bvmul row heads) lane) #b0000000000000000000000000000000010000000000000000000000000000000)))
(check-sat)
