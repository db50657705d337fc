/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of the FUSE front end share: fuse.c (session) and fuse_pages.c (requests). */
#ifndef ISWI_FUSE_FRONTEND_H
#define ISWI_FUSE_FRONTEND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "engine/request.h"
#include "frontend/frontend.h"

extern const struct iswi_frontend_ops iswi_fuse_ops; /* in fuse.c, or fuse_none.c */

#define ISWI_FUSE_DISK_NODE 2 /* the root is FUSE_ROOT_ID, 1 */

struct fuse_session;

/*
 * One request's buffer:
 *   | struct slot ... message head | data, page aligned ...            |
 *   |        one page              | request_bytes, at least two pages |
 * A message is read to just before the data, so that what a WRITE carries lands page aligned; a
 * READ's bytes are put where a WRITE's would be.
 */
struct iswi_fuse_slot {
	struct iswi_req req;
	struct iswi_fuse *fe;
	struct iswi_fuse_slot *next; /* in the free list */
	uint64_t unique;             /* the kernel's number of the request */
};

enum iswi_fuse_phase { ISWI_FUSE_STARTING, ISWI_FUSE_SERVING, ISWI_FUSE_ENDED };

struct iswi_fuse {
	isw_frontend base;
	isw_engine *engine; /* borrowed */
	struct fuse_session *session;
	char *mountpoint;
	int fd;      /* borrowed from session; non-blocking */
	int wake_fd; /* eventfd: readable once stopping */
	pthread_t thread;
	struct iswi_plug plug; /* the session thread's own */
	/* fe_stop stores (release); the session thread loads (acquire) before each receive. */
	atomic_bool stopping;
	/* Relaxed: it only says that the end of the connection is no news. */
	atomic_bool leaving;

	/* The kernel's first message; written before the phase is SERVING, read after. */
	char init[ISW_FRONTEND_NOTE_BYTES_MAX];
	size_t init_bytes;
	bool started;   /* the thread runs; control threads only */
	bool has_mount; /* we have made it, and not unmounted it; control threads only */
	bool replaying; /* its answer, which the kernel has had already, is not sent */

	uint64_t size_bytes;
	uint32_t request_bytes; /* largest READ and WRITE */
	uint32_t background_max;
	struct timespec mounted;

	char *memory; /* slots_max buffers of slot_bytes each */
	size_t slot_bytes;
	uint32_t slots_max;

	pthread_mutex_t lock; /* the only lock here; it guards the members below */
	pthread_cond_t changed;
	struct iswi_fuse_slot *free;
	uint32_t slots_free;
	enum iswi_fuse_phase phase;
};

/* Makes the buffers. Freed with munmap(memory). */
int iswi_fuse_slots_init(struct iswi_fuse *fe);
/*
 * Waits for a free buffer, which comes when the engine ends a request. Meanwhile further requests
 * queue in the kernel.
 */
struct iswi_fuse_slot *iswi_fuse_slot_take(struct iswi_fuse *fe);
/* The caller must not touch the front end afterwards: destroy may be waiting for this slot. */
void iswi_fuse_slot_put(struct iswi_fuse_slot *slot);

/* Where a message is read to, and how much fits. */
char *iswi_fuse_message(struct iswi_fuse_slot *slot);
size_t iswi_fuse_message_bytes_max(const struct iswi_fuse *fe);

enum iswi_fuse_handled {
	ISWI_FUSE_TAKEN,    /* the slot is the engine's now */
	ISWI_FUSE_ANSWERED, /* the slot can take the next message */
	ISWI_FUSE_NOT_OURS, /* a message for libfuse */
};
/* Handles a message of that many bytes, at least a struct fuse_in_header. */
enum iswi_fuse_handled iswi_fuse_handle(struct iswi_fuse *fe, struct iswi_fuse_slot *slot,
					size_t bytes);

#endif
