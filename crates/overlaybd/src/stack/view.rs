//! What lowers and an upper hold together at one moment: where each sector is, and reading it. It changes nothing.

use std::io;

use super::{Extent, ExtentKind, Lowers};
use crate::index::{Piece, Place};
use crate::io::ReadAt;
use crate::record::SECTOR;
use crate::upper::Upper;
use crate::{Error, Result};

/// Pieces of the upper that are looked up at a time, under its lock.
const BATCH: usize = 8;

/// Lowers, an upper, or both.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) lowers: Option<&'a Lowers>,
    pub(crate) upper: Option<&'a Upper>,
}

/// Who holds a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Upper,
    Lower(u8),
}

/// A read to be done: neighbours in one file that are neighbours on the device.
struct Run {
    holder: Holder,
    physical: u64,
    /// Place in the caller's buffer, in sectors.
    from: u64,
    length: u64,
}

/// How a source is read: all of the buffer, or `false` when that would wait.
type Reader = fn(&dyn ReadAt, &mut [u8], u64) -> io::Result<bool>;

impl<'a> View<'a> {
    /// Fill the buffer with whole sectors from `lba`.
    pub(crate) fn read(&self, buffer: &mut [u8], lba: u64) -> Result<()> {
        self.read_with(buffer, lba, |source, buffer, offset| {
            source.read_exact_at(buffer, offset).map(|()| true)
        })?;
        Ok(())
    }

    /// The same, unless it would wait: then `false`.
    pub(crate) fn try_read(&self, buffer: &mut [u8], lba: u64) -> Result<bool> {
        self.read_with(buffer, lba, |source, buffer, offset| {
            source.try_read_exact_at(buffer, offset)
        })
    }

    fn read_with(&self, buffer: &mut [u8], lba: u64, read: Reader) -> Result<bool> {
        let mut pending: Option<Run> = None;
        let sectors = buffer.len() as u64 / SECTOR;
        let complete = self.visit(lba, sectors, |piece, holder| {
            let from = piece.lba - lba;
            if let (Some(run), Place::Data { physical, .. }) = (&mut pending, piece.place) {
                if run.holder == holder
                    && run.physical + run.length == physical
                    && run.from + run.length == from
                {
                    run.length += piece.length;
                    return Ok(true);
                }
            }
            if let Some(run) = pending.take() {
                if !self.fetch(&run, buffer, read)? {
                    return Ok(false);
                }
            }
            match piece.place {
                Place::Data { physical, .. } => {
                    pending = Some(Run {
                        holder,
                        physical,
                        from,
                        length: piece.length,
                    });
                }
                Place::Hole | Place::Zero => part(buffer, from, piece.length).fill(0),
            }
            Ok(true)
        })?;
        match pending {
            Some(run) if complete => self.fetch(&run, buffer, read),
            _ => Ok(complete),
        }
    }

    fn fetch(&self, run: &Run, buffer: &mut [u8], read: Reader) -> Result<bool> {
        let source = match run.holder {
            Holder::Upper => self.upper.map(Upper::source),
            Holder::Lower(tag) => self
                .lowers
                .and_then(|lowers| lowers.layers().get(usize::from(tag)))
                .map(|layer| layer.source().as_ref()),
        };
        let source = source
            .ok_or_else(|| Error::Invalid("an index names a layer that is not there".into()))?;
        Ok(read(
            source,
            part(buffer, run.from, run.length),
            run.physical * SECTOR,
        )?)
    }

    /// Call `visit` with the pieces that tile `sectors` sectors from `lba`, in order, until it returns `false`. Whether
    /// it never did.
    fn visit(
        &self,
        lba: u64,
        sectors: u64,
        mut visit: impl FnMut(Piece, Holder) -> Result<bool>,
    ) -> Result<bool> {
        let Some(upper) = self.upper else {
            return self.visit_lowers(lba, sectors, &mut visit);
        };
        let mut pieces = [Piece {
            lba: 0,
            length: 0,
            place: Place::Hole,
        }; BATCH];
        let mut position = lba;
        let end = lba + sectors;
        while position < end {
            let count = upper.pieces(position, end - position, &mut pieces);
            for piece in &pieces[..count] {
                let go_on = match piece.place {
                    Place::Hole => self.visit_lowers(piece.lba, piece.length, &mut visit)?,
                    Place::Zero | Place::Data { .. } => visit(*piece, Holder::Upper)?,
                };
                if !go_on {
                    return Ok(false);
                }
                position += piece.length;
            }
        }
        Ok(true)
    }

    fn visit_lowers(
        &self,
        lba: u64,
        sectors: u64,
        visit: &mut impl FnMut(Piece, Holder) -> Result<bool>,
    ) -> Result<bool> {
        let Some(lowers) = self.lowers else {
            return visit(
                Piece {
                    lba,
                    length: sectors,
                    place: Place::Hole,
                },
                Holder::Lower(0),
            );
        };
        for piece in lowers.index().pieces(lba, sectors) {
            let holder = match piece.place {
                Place::Data { tag, .. } => Holder::Lower(tag),
                Place::Hole | Place::Zero => Holder::Lower(0),
            };
            if !visit(piece, holder)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Call `visit` with the extents that tile `sectors` sectors from `lba`, in order, neighbours of one kind joined.
    /// Offsets and lengths are in bytes.
    pub(crate) fn extents(
        &self,
        lba: u64,
        sectors: u64,
        mut visit: impl FnMut(Extent) -> Result<()>,
    ) -> Result<()> {
        let mut pending: Option<Extent> = None;
        self.visit(lba, sectors, |piece, _| {
            let kind = match piece.place {
                Place::Hole => ExtentKind::Hole,
                Place::Zero => ExtentKind::Zero,
                Place::Data { .. } => ExtentKind::Data,
            };
            let length = piece.length * SECTOR;
            match &mut pending {
                Some(extent) if extent.kind == kind => extent.length += length,
                _ => {
                    if let Some(extent) = pending.replace(Extent {
                        offset: piece.lba * SECTOR,
                        length,
                        kind,
                    }) {
                        visit(extent)?;
                    }
                }
            }
            Ok(true)
        })?;
        pending.map_or(Ok(()), visit)
    }

    /// Call `visit` with the runs of sectors (first, count) that would show something if the upper said nothing of them,
    /// or that the upper stores: those that a discard must record.
    pub(crate) fn shown(
        &self,
        lba: u64,
        sectors: u64,
        mut visit: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        self.extents(lba, sectors, |extent| match extent.kind {
            ExtentKind::Data => visit(extent.offset / SECTOR, extent.length / SECTOR),
            ExtentKind::Zero | ExtentKind::Hole => Ok(()),
        })
    }
}

fn part(buffer: &mut [u8], from: u64, length: u64) -> &mut [u8] {
    &mut buffer[(from * SECTOR) as usize..((from + length) * SECTOR) as usize]
}
