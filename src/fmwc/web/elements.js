// Colours and covalent radii of the elements: the colours of Jmol, slightly greyer and lighter, as in the figures of the
// reports (`fmwc.crystals.drawing`), and the radii of Cordero et al. (2008) in pm.

const SYMBOLS = (
  "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc " +
  "Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi " +
  "Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr"
).split(" ");
const COLOURS = (
  "f7f7f7 dbf6f6 c791eb c6f13e f0bcbc 9a9a9a 4f65dc e13636 a0d873 bcdeeb ab74dd 9def3b bfaeae e6caae ea9036 f5f562 4cdf4c " +
  "95ceda 945cc4 63ec38 e2e2e2 c2c4c8 adadb0 97a2c2 a28ac0 d17b57 e29ea9 6fc96f c18f58 8b8daf bf9b9b 7b9898 bb90d6 ecaa38 " +
  "a14949 77b8ca 7b4ca8 36ea36 a7f3f3 a5dada 89c1c6 71b5b5 5ca2a2 499595 358690 2b7689 c2c2c2 f3d8a4 a88584 798c8c a178b2 " +
  "c98a34 912991 62a2af 66398d 31bf31 89d0ee f7f7cf daf5cd cdf4cd b2f3cb a3f2ca 81f0c9 6cefc8 5ceec7 50eec6 38eca6 35d888 " +
  "33c96d 31b859 2fa849 6ec0eb 6baae9 489ac8 4a87a8 487597 3b668a d0d0db f1d055 bcbccd a56b66 6a6c72 a068b0 a8702f 80655e " +
  "5f8c9a 54256d 2b832b 86b0e7 34b7e7 32a3e5 3095e4 2f89e3 2d79e1 6a70da 8571d1 9168d0 a055c4 ac44c3 ac43b1 aa35a1 b1358b " +
  "b72b73"
).split(" ");
const RADII = (
  "31 28 128 96 84 76 71 66 57 58 166 141 121 111 107 105 102 106 203 176 170 160 153 139 139 132 126 124 132 122 122 120 " +
  "119 120 120 116 220 195 190 175 164 154 147 146 142 139 145 144 142 139 139 138 139 140 244 215 207 204 203 201 199 198 " +
  "198 196 194 192 192 189 190 187 187 175 170 162 151 144 141 136 136 132 145 146 148 140 150 150 260 221 215 206 200 196 " +
  "190 187 180 169"
).split(" ");
const UNKNOWN = { symbol: "?", colour: "#b8b8bd", radius: 1.5, binds: false };
// A bond needs a non-metal or a metalloid at one end; otherwise all neighbours in a metal would be joined.
const BINDING = new Set("H B C N O F Si P S Cl Ge As Se Br Sb Te I".split(" "));

const table = SYMBOLS.map((symbol, i) => ({
  symbol,
  colour: `#${COLOURS[i]}`,
  radius: i < RADII.length ? RADII[i] / 100 : UNKNOWN.radius,
  binds: BINDING.has(symbol),
}));

/** Return symbol, colour, covalent radius (Å) and whether bonds to the element are drawn, by atomic number. */
export const element = (z) => table[z - 1] || UNKNOWN;
