// Read safetensors, the format of all large data: of the studio's answers and of the data inside a report page.

const KINDS = { F32: Float32Array, F64: Float64Array, I32: Int32Array, U8: Uint8Array, BOOL: Uint8Array };

/**
 * Return the tensors of a safetensors file by name, and its metadata. The arrays share the file's memory.
 *
 * @param {ArrayBuffer} buffer
 * @returns {{tensors: Record<string, {shape: number[], data: any}>, metadata: Record<string, string>}}
 */
export function readTensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const { __metadata__: metadata = {}, ...entries } = header;
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
    const Kind = KINDS[dtype], start = 8 + size + begin;
    if (!Kind) throw new Error(`the tensor ${name} has the type ${dtype}, which this page cannot read`);
    const aligned = start % Kind.BYTES_PER_ELEMENT === 0;
    const data = aligned ? new Kind(buffer, start, (end - begin) / Kind.BYTES_PER_ELEMENT) : new Kind(buffer.slice(start, 8 + size + end));
    tensors[name] = { shape, data };
  }
  return { tensors, metadata };
}

/** Return the bytes of base64 text. */
export function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes.buffer;
}
