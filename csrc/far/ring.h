/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an agent (csrc/far/, in a job's process) and the front end `far` (in the device's process)
 * say to each other. Both include this header and nothing else of the other.
 *
 * A job has one SEQPACKET socket pair; its processes inherit the job's end. A process whose memory
 * becomes far sends a hello there, with one end of a socket pair of its own and its userfaultfd.
 * The answer comes on that pair: a welcome with the ring, or a refusal. That pair's end, for
 * whatever reason, tells the agent that the device's process is gone; it then says hello again.
 * A process learns of the job's socket by its environment: INFINISWAP_FAR=JOB_FD:DEVICE_FD:CGROUP,
 * with an open /dev/userfaultfd (or -1) and the directory of the job's memory cgroup.
 *
 * The ring is memory of the device's: a header with the slots, then a block of bytes for each slot.
 * A slot holds one request. The agent fills it and stores ASKED, then rings the bell of its kind;
 * the front end stores ANSWERED and wakes those who wait for the word; the agent stores FREE.
 *
 * The front end trusts nothing in the ring: it reads each word of a request once, checks the copy,
 * and looks at the bytes once. An agent names blocks by numbers of its own, below blocks_max, which
 * is more than the device has blocks; where a block's bytes are is known to the device alone.
 */
#ifndef ISWI_FAR_RING_H
#define ISWI_FAR_RING_H

#include <stdatomic.h>
#include <stdint.h>

#define ISWF_VERSION     3u
#define ISWF_MAGIC       0x52414657u
#define ISWF_PAGE_BYTES  4096u
#define ISWF_BLOCK_BYTES (2u << 20)
#define ISWF_BLOCK_PAGES (ISWF_BLOCK_BYTES / ISWF_PAGE_BYTES)
#define ISWF_TOKEN_BYTES 16u

/* Slots by kind: which bell is rung, and which thread of the device's looks there. */
#define ISWF_READ_SLOTS  4u /* all but writes */
#define ISWF_WRITE_SLOTS 2u
#define ISWF_SLOTS       (ISWF_READ_SLOTS + ISWF_WRITE_SLOTS)
#define ISWF_KINDS       2u
#define ISWF_KIND_READ   0u
#define ISWF_KIND_WRITE  1u

enum iswf_state { ISWF_FREE, ISWF_ASKED, ISWF_ANSWERED };

enum iswf_op {
	ISWF_READ,    /* pages of a block that this agent has written, into the slot's bytes */
	ISWF_WRITE,   /* the slot's bytes; the block's first write gives it a place: -ENOSPC */
	ISWF_DISCARD, /* pages [first, first + pages) are needed no more; all: so is the place */
	ISWF_CONFIRM  /* whether a read of these pages would find them now; no bytes are moved */
};

/* One cache line. `state` orders the rest: release by who stores, acquire by who looks. */
struct iswf_slot {
	_Atomic uint32_t state; /* enum iswf_state; a futex */
	uint32_t op;
	uint32_t block; /* the agent's number of it */
	uint32_t first; /* page of the block */
	uint32_t pages; /* at least 1; the bytes of page `first` begin the slot's */
	int32_t result; /* 0 or -errno: see the answers below */
	uint32_t unused[10];
};

/* Why pages were handed back: from then on they are the kernel's, in memory or in the swap area. */
enum iswf_why {
	ISWF_WHY_FORK,      /* the process forked */
	ISWF_WHY_LOCKED,    /* mlock */
	ISWF_WHY_PROTECTED, /* mprotect other than read and write */
	ISWF_WHY_POLICY,    /* mbind */
	ISWF_WHY_FIXED,     /* a mapping was laid over them */
	ISWF_WHY_MOVED,     /* mremap of a part */
	ISWF_WHY_ADVICE,    /* madvise */
	ISWF_WHY_ENDED,     /* mlockall, seccomp, RLIMIT_AS: nothing of it is far from then on */
	ISWF_WHY_PINNED,    /* the kernel refused to move them, again and again */
	ISWF_WHY_STACK,     /* a thread's stack was made there */
	ISWF_WHYS
};

/*
 * What an agent says of itself, for people: the front end adds it up and shows it, and nothing else
 * depends on it. Within one ring no count falls; a new ring begins with the totals so far. Relaxed.
 */
struct iswf_told {
	_Atomic uint64_t pages_out, pages_in, small_fetches, fetches, fetch_wait_ns, room_waits,
		room_wait_ns, pages_lost, pauses, pause_ns;
	_Atomic uint64_t pages_back[ISWF_WHYS];
};

/*
 * Answers. -ENOSPC: no room for one more block; nothing was written. -EIO: of a read: read by
 * single pages to learn which are lost; of a write: not stored, the agent keeps the bytes; of a
 * confirmation: of one page at least no copy can be had now.
 * -ENODATA: of a read of one page: its bytes are lost for good. -EINVAL: a request that no agent
 * makes; -ENOENT: of a block that was never written.
 */

struct iswf_ring {
	struct iswf_slot slots[ISWF_SLOTS];
	struct iswf_told told;
	_Atomic uint64_t pages_away; /* now; likewise, but it falls, too */
	/* The front end's: how many other processes of the job have much away. */
	_Atomic uint32_t others;
};

#define ISWF_RING_HEADER_BYTES 4096u
#define ISWF_RING_BYTES        (ISWF_RING_HEADER_BYTES + ISWF_SLOTS * ISWF_BLOCK_BYTES)

_Static_assert(sizeof(struct iswf_ring) <= ISWF_RING_HEADER_BYTES, "the ring's header is a page");

static inline uint32_t iswf_first_slot(uint32_t kind)
{
	return kind == ISWF_KIND_READ ? 0 : ISWF_READ_SLOTS;
}
static inline uint32_t iswf_slots(uint32_t kind)
{
	return kind == ISWF_KIND_READ ? ISWF_READ_SLOTS : ISWF_WRITE_SLOTS;
}
static inline uint32_t iswf_kind_of(uint32_t slot)
{
	return slot < ISWF_READ_SLOTS ? ISWF_KIND_READ : ISWF_KIND_WRITE;
}
static inline char *iswf_bytes(struct iswf_ring *ring, uint32_t slot)
{
	return (char *)ring + ISWF_RING_HEADER_BYTES + (uint64_t)slot * ISWF_BLOCK_BYTES;
}

/* Why a process has no agent. */
enum iswf_off {
	ISWF_OFF_NONE,
	ISWF_OFF_KERNEL,     /* no userfaultfd that moves pages */
	ISWF_OFF_PERMISSION, /* userfaultfd may not be used */
	ISWF_OFF_CGROUP,     /* the files of the job's cgroup cannot be read */
	ISWF_OFF_ADDRESSES,  /* RLIMIT_AS, RLIMIT_DATA or overcommit 2 leave too few */
	ISWF_OFF_LOCKED,     /* mlockall(MCL_FUTURE) */
	ISWF_OFF_THREADS,    /* a thread cannot be started */
	ISWF_OFF_RESOURCES,  /* descriptors or memory are missing */
	ISWF_OFF_DEVICE,     /* the device did not answer in time */
	ISWF_OFF_SANDBOX,    /* seccomp: a filter of system calls */
	ISWF_OFF_VERSION,    /* the device speaks another version of this */
	ISWF_OFFS
};

/*
 * With two descriptors: the front end's end of the process's socket pair, and its userfaultfd.
 * Where `off` is not ISWF_OFF_NONE there are none, and no answer: the front end counts the reason.
 */
struct iswf_hello {
	uint32_t magic, version;
	uint32_t client; /* 0: a new one; else the one that was given this token: it keeps its
			    blocks */
	uint32_t off;    /* enum iswf_off */
	uint8_t token[ISWF_TOKEN_BYTES];
};

/* With three descriptors: the ring's memory, then a bell for each kind; with none if refused. */
struct iswf_welcome {
	uint32_t magic, version;
	/* 0, or -errno. -EPROTO (another version) and -EINVAL (an unknown client) are final; who
	 * came back asks again after any other. -ENOSPC: too many processes. */
	int32_t refused;
	uint32_t client;
	uint32_t blocks_max; /* numbers of blocks are below this */
	uint32_t unused;
	uint8_t token[ISWF_TOKEN_BYTES];
};

#endif
