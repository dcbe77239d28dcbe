//! The frames of Connect streams: one flag byte, a big-endian 32-bit length, the payload.

use bytes::{Buf, Bytes, BytesMut};

use super::{
    codec::{Codec, Message},
    Code, RpcError, RpcResult,
};

const HEADER_LEN: usize = 5;
const FLAG_COMPRESSED: u8 = 1;
const FLAG_END: u8 = 2;

/// Largest message that a client may send; beyond it the call fails with `resource_exhausted`.
pub const MAX_MESSAGE: usize = 64 << 20;

/// One message as a frame.
pub fn message<T: Message>(codec: Codec, message: &T) -> RpcResult<Bytes> {
    let mut frame = vec![0; HEADER_LEN];
    codec.encode(message, &mut frame)?;
    seal(frame)
}

/// The frame that ends a stream, with or without an error. Its payload is JSON whatever the codec.
pub fn end(error: Option<&RpcError>) -> Bytes {
    let payload = match error {
        None => serde_json::json!({}),
        Some(error) => {
            serde_json::json!({"error": {"code": error.code.as_str(), "message": error.message}})
        }
    };
    let payload = payload.to_string();
    let mut frame = Vec::with_capacity(HEADER_LEN + payload.len());
    frame.push(FLAG_END);
    frame.extend_from_slice(
        &u32::try_from(payload.len())
            .unwrap_or(u32::MAX)
            .to_be_bytes(),
    );
    frame.extend_from_slice(payload.as_bytes());
    frame.into()
}

fn seal(mut frame: Vec<u8>) -> RpcResult<Bytes> {
    let len = u32::try_from(frame.len() - HEADER_LEN)
        .map_err(|_| RpcError::new(Code::Internal, "the answer is larger than a frame can be"))?;
    frame[1..HEADER_LEN].copy_from_slice(&len.to_be_bytes());
    Ok(frame.into())
}

/// What [`take`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    Message(Bytes),
    End,
    /// The buffer does not hold a whole frame yet.
    Incomplete,
}

/// Takes the next frame from the front of `buffer`.
///
/// Fails with `resource_exhausted` for a message above [`MAX_MESSAGE`], before it is read, with `unimplemented` for a
/// compressed one (none was negotiated), with `invalid_argument` for unknown flags.
pub fn take(buffer: &mut BytesMut) -> RpcResult<Taken> {
    if buffer.len() < HEADER_LEN {
        return Ok(Taken::Incomplete);
    }
    let flags = buffer[0];
    let len = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if len > MAX_MESSAGE {
        return Err(too_large(len));
    }
    if flags & FLAG_COMPRESSED != 0 {
        return Err(RpcError::new(
            Code::Unimplemented,
            "compressed messages are not supported",
        ));
    }
    if flags & !FLAG_END != 0 {
        return Err(RpcError::new(
            Code::InvalidArgument,
            format!("unknown frame flags {flags:#x}"),
        ));
    }
    if buffer.len() < HEADER_LEN + len {
        return Ok(Taken::Incomplete);
    }
    buffer.advance(HEADER_LEN);
    let payload = buffer.split_to(len).freeze();
    Ok(if flags & FLAG_END != 0 {
        Taken::End
    } else {
        Taken::Message(payload)
    })
}

/// The error for a message of `len` bytes.
pub fn too_large(len: usize) -> RpcError {
    RpcError::new(
        Code::ResourceExhausted,
        format!("the message has {len} bytes, at most {MAX_MESSAGE} are accepted"),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::process::ProcessConfig;

    fn frame(flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![flags];
        frame.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }

    proptest! {
        #[test]
        fn frames_survive_any_split(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            cut in 1usize..64,
        ) {
            let mut wire = Vec::new();
            for payload in &payloads {
                wire.extend(frame(0, payload));
            }
            wire.extend(frame(2, b"{}"));
            let mut buffer = BytesMut::new();
            let mut seen = Vec::new();
            let mut ended = false;
            for piece in wire.chunks(cut) {
                buffer.extend_from_slice(piece);
                loop {
                    match take(&mut buffer).unwrap() {
                        Taken::Message(payload) => seen.push(payload.to_vec()),
                        Taken::End => ended = true,
                        Taken::Incomplete => break,
                    }
                }
            }
            prop_assert_eq!(seen, payloads);
            prop_assert!(ended && buffer.is_empty());
        }
    }

    #[test]
    fn written_frames_are_read_back() {
        let config = ProcessConfig {
            cmd: "true".into(),
            ..Default::default()
        };
        for codec in [Codec::Json, Codec::Proto] {
            let mut buffer = BytesMut::from(&message(codec, &config).unwrap()[..]);
            let Taken::Message(payload) = take(&mut buffer).unwrap() else {
                panic!("no message");
            };
            assert_eq!(codec.decode::<ProcessConfig>(&payload).unwrap(), config);
        }
    }

    #[test]
    fn a_huge_length_is_refused_from_its_header() {
        let mut buffer = BytesMut::from(&[0u8, 0xff, 0xff, 0xff, 0xff][..]);
        assert_eq!(take(&mut buffer).unwrap_err().code, Code::ResourceExhausted);
    }

    #[test]
    fn compressed_and_unknown_flags_are_refused() {
        let mut buffer = BytesMut::from(&frame(1, b"x")[..]);
        assert_eq!(take(&mut buffer).unwrap_err().code, Code::Unimplemented);
        let mut buffer = BytesMut::from(&frame(8, b"x")[..]);
        assert_eq!(take(&mut buffer).unwrap_err().code, Code::InvalidArgument);
    }

    #[test]
    fn the_end_frame_carries_the_error() {
        let frame = end(Some(&RpcError::new(Code::NotFound, "no")));
        assert_eq!(frame[0], 2);
        assert_eq!(
            &frame[5..],
            br#"{"error":{"code":"not_found","message":"no"}}"#
        );
        assert_eq!(&end(None)[..], b"\x02\x00\x00\x00\x02{}");
    }
}
