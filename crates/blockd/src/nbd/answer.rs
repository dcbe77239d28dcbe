//! The replies to requests, as the agreement of the connection has them.
//!
//! No I/O but what a reply needs from the device.

use std::io;

use super::request::Request;
use super::wire::{self, command, command_flag, errno};
use super::Agreement;
use crate::backend::{BlockBackend, Content, SECTOR};

/// Extents in one answer.
pub(super) const EXTENTS: usize = 2048;

/// Bytes in front of the data of a read's reply.
pub(super) fn read_header_size(agreement: Agreement) -> usize {
    if agreement.structured_replies {
        wire::CHUNK_SIZE + 8
    } else {
        wire::SIMPLE_REPLY_SIZE
    }
}

/// Fill in what stands in front of the data.
pub(super) fn write_read_header(reply: &mut [u8], request: &Request, agreement: Agreement) {
    if agreement.structured_replies {
        let header = wire::read_chunk(request.cookie, request.offset, request.length);
        reply[..header.len()].copy_from_slice(&header);
    } else {
        let header = wire::simple_reply(request.cookie, 0);
        reply[..header.len()].copy_from_slice(&header);
    }
}

/// Read, and make the whole reply.
pub(super) fn read_reply(
    backend: &dyn BlockBackend,
    request: &Request,
    agreement: Agreement,
) -> Vec<u8> {
    let header = read_header_size(agreement);
    let mut reply = vec![0; header + request.length as usize];
    match backend.read_at(&mut reply[header..], request.offset) {
        Ok(()) => {
            write_read_header(&mut reply, request, agreement);
            reply
        }
        Err(error) => error_reply(request, wire::error_number(&error), agreement),
    }
}

/// The reply of a request that failed.
pub(super) fn error_reply(request: &Request, number: u32, agreement: Agreement) -> Vec<u8> {
    let structured = matches!(request.command, command::READ | command::BLOCK_STATUS);
    if agreement.structured_replies && structured {
        wire::error_chunk(request.cookie, number).to_vec()
    } else {
        wire::simple_reply(request.cookie, number).to_vec()
    }
}

/// The reply of a request that has no data.
pub(super) fn status_reply(
    request: &Request,
    result: io::Result<()>,
    agreement: Agreement,
) -> Vec<u8> {
    match result {
        Ok(()) => wire::simple_reply(request.cookie, 0).to_vec(),
        Err(error) => error_reply(request, wire::error_number(&error), agreement),
    }
}

/// Look at what a range holds, and make the reply.
pub(super) fn block_status(
    backend: &dyn BlockBackend,
    request: &Request,
    agreement: Agreement,
) -> Vec<u8> {
    const HOLE: u32 = 1;
    const ZERO: u32 = 2;
    if !agreement.allocation || u64::from(request.length) < SECTOR {
        return error_reply(request, errno::INVALID, agreement);
    }
    let limit = if request.has(command_flag::ONE_EXTENT) {
        1
    } else {
        EXTENTS
    };
    let extents = match backend.extents(request.offset, u64::from(request.length), limit) {
        Ok(extents) => extents,
        Err(error) => return error_reply(request, wire::error_number(&error), agreement),
    };
    let mut described: Vec<(u32, u32)> = Vec::with_capacity(extents.len());
    for extent in extents {
        let flags = match extent.content {
            Content::Data => 0,
            // A recorded zero hides what is below and stores nothing: to a client, a hole as well.
            Content::Zero | Content::Hole => HOLE | ZERO,
        };
        let length = u32::try_from(extent.length).unwrap_or(u32::MAX - 511);
        match described.last_mut() {
            Some((last, same)) if *same == flags && last.checked_add(length).is_some() => {
                *last += length
            }
            _ => described.push((length, flags)),
        }
    }
    wire::status_chunk(request.cookie, &described)
}
