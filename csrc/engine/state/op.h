/* SPDX-License-Identifier: Apache-2.0 */
/* One transfer of the engine's: to or from a donor, or a read of the backup. */
#ifndef ISWI_STATE_OP_H
#define ISWI_STATE_OP_H

#include "engine/state/engine.h"
#include "transport/transport.h"

#define ISWI_TRIED_REMOTE 0x3 /* a donor has failed this read: a bit for each place */
#define ISWI_TRIED_BACKUP 0x4
#define ISWI_RETRIED      0x8  /* bytes did not fit their seal once: a write may have passed by */
#define ISWI_HEDGED       0x10 /* was hedged, in vain: it is not again */
#define ISWI_PAST_SLOW    0x20 /* from the backup, if that has it */
#define ISWI_BACK         0x40 /* was hedged bare, and its donor answered: it may be again */
#define ISWI_UNREACHED    0x80 /* a source that was tried gave no bytes: it may another time */

static inline uint8_t iswi_tried_place(uint32_t place)
{
	return (uint8_t)(1u << place);
}

/* What became of the legs of a hedged read. */
#define ISWI_HEDGE_WON         0x1 /* the request is answered, or its pages are read again */
#define ISWI_HEDGE_REMOTE_END  0x2
#define ISWI_HEDGE_BACKUP_END  0x4
#define ISWI_HEDGE_REMOTE_FAIL 0x8 /* ended with an error */
#define ISWI_HEDGE_BACKUP_FAIL 0x10

/* One transfer to or from a donor, or a read of the backup: a run of pages of one slab. */
struct iswi_op {
	struct iswi_xfer xfer;
	struct isw_engine *engine;
	struct iswi_req *req; /* reads */
	uint64_t page;
	/* Of the place, when the op was made; in a copy's read, of the place that it is for. */
	uint64_t word;
	uint32_t pages;
	uint32_t slab;
	uint64_t measured_ns; /* when a read began that measures its source; 0: it does not */
	/* Writes, copies: first of `pages` consecutive staging buffers. Legs: their pair. */
	uint32_t slot;
	uint64_t number;   /* reads: of the first page's seal when they began */
	uint32_t remote;   /* where it was sent */
	atomic_uint hedge; /* ISWI_HEDGE_*, in the donor's leg; seq_cst: orders the legs' ends */
	uint8_t load;      /* reads: see state/speed.h */
	uint8_t place;     /* of which it holds a use */
	uint8_t tried;
	bool copy; /* of copy.c: a read without a request, then a write */
	bool pull; /* a copy from the slab's other place */
	bool last; /* the donor's leg of a read that the backup got first: sent when that is slow */
	bool slow; /* a read of the backup: xfer.slow was called; backup lock until it has ended */
	bool owed; /* ... and it was not expected to take so long; or a slow read of a donor */
	/* A read of the backup, a slow read of a donor, a pulled page's write: what follows it. */
	void (*done)(struct iswi_op *op, int error);
	struct iswi_op *next;      /* free list or backup read queue */
	struct iswi_op *slow_next; /* a read of the backup: see struct iswi_backup */
	struct iswi_op *twin;      /* of a hedged read: the other leg */
};

/* Where the request's page comes. */
static inline unsigned char *iswi_opened_at(const struct iswi_req *req, uint64_t page)
{
	unsigned char *first = req->opened != NULL ? req->opened : req->data;

	return first + (page * ISW_PAGE_BYTES - req->offset);
}

#endif
