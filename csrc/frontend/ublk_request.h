/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ublk queue's requests without its ring: what the kernel's descriptors say, and the list by
 * which ended requests come back to the thread that owns the ring.
 */
#ifndef ISWI_UBLK_REQUEST_H
#define ISWI_UBLK_REQUEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/request.h"
#include "frontend/ublk_abi.h"

struct iswi_ublk_queue;

/* One of the kernel's tags, with a buffer of its own for as long as the device lives. */
struct iswi_ublk_tag {
	struct iswi_req req; /* data: set once */
	struct iswi_ublk_queue *queue;
	struct iswi_ublk_tag *next; /* while ended */
	int32_t result;             /* once ended: bytes, or a negative errno */
	uint16_t number;
	bool foreign; /* once ended: not on the ring owner's thread */
};

/*
 * Requests that have ended, pushed by any thread, taken all at once by the ring's owner. The push
 * releases what was written to the tag and its buffer, the take acquires it.
 */
struct iswi_ublk_ended {
	_Atomic(struct iswi_ublk_tag *) last;
};

/*
 * Returns true when the list was empty: the owner, if that is another thread, has to be told, once
 * for all that follow until it takes them. The owner may have taken, and freed, the tag by then.
 */
bool iswi_ublk_ended_push(struct iswi_ublk_ended *ended, struct iswi_ublk_tag *tag);
/* The oldest first; NULL when there are none. */
struct iswi_ublk_tag *iswi_ublk_ended_take(struct iswi_ublk_ended *ended);

/*
 * Fills op, flags, offset and length of tag->req. 0, or the errno to answer the kernel with; the
 * engine checks the range.
 */
int iswi_ublk_parse(const struct ublksrv_io_desc *desc, struct iswi_ublk_tag *tag);
/* What the kernel wants to hear of a request that ended so. */
int32_t iswi_ublk_result(const struct iswi_req *req, int error);

#endif
