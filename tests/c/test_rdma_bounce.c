/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport's bounce ring, when a READ is submitted in the very moment in which the
 * receiver looks at what is done: it has dropped the lock for that. On the stub. The receiver is
 * compiled here, with a place to stop at there.
 */
#include <pthread.h>
#include <stdatomic.h>

static void unlock_and_meet(pthread_mutex_t *lock, const char *function);
#define pthread_mutex_unlock(lock) unlock_and_meet(lock, __func__)
#include "transport/rdma_recv.c"
#undef pthread_mutex_unlock

#include "rdma_fixture.h"

static struct op between;
static char page[ISW_PAGE_BYTES], other[ISW_PAGE_BYTES];
static atomic_bool armed;

/* The first time in complete: nothing is done from here on, and one READ more is posted. */
static void unlock_and_meet(pthread_mutex_t *lock, const char *function)
{
	pthread_mutex_unlock(lock);
	if (strcmp(function, "complete") != 0 || !atomic_exchange(&armed, false))
		return;
	STUB_SET(frozen, true);
	op_start(&between, &rig.client, ISWI_XFER_READ, rig_offset(0, 1), page, sizeof(page));
}

/* What is posted and not carried yet does not share memory. */
static void check_posted_apart(uint32_t count)
{
	STUB_LOCKED();
	uint32_t seen = 0;

	for (uint32_t i = 0; i < STUB_QPS; i++) {
		const struct iswi_vqp *qp = stub.qps[i];
		const void *last = NULL;

		for (uint32_t at = 0; qp != NULL && at < qp->count; at++, seen++) {
			void *local = qp->posts[(qp->first + at) % qp->config.sends_max].local;

			CHECK(local != last);
			last = local;
		}
	}
	CHECK_EQ(seen, count);
}

/* Whatever is found done then: a staged WRITE has no part in the ring, which is empty beside it. */
TEST_CASES(test_two_reads_do_not_share_bounce_memory, 3, which)
{
	static const enum iswi_xfer_kind kinds[] = {ISWI_XFER_WRITE, ISWI_XFER_WRITE,
						    ISWI_XFER_READ};
	static char own[ISW_PAGE_BYTES];
	struct op after;

	rig_start((struct rig){0});
	memset(rig.memory + rig_offset(0, 1), 1, ISW_PAGE_BYTES);
	memset(rig.memory + rig_offset(0, 2), 2, ISW_PAGE_BYTES);
	CHECK_EQ(rig_do(ISWI_XFER_READ, 0, 0, page), 0);
	atomic_store(&armed, true);
	CHECK_EQ(rig_do(kinds[which], 1, 0, which == 0 ? rig.staging : own), 0);
	rig_op(&after, ISWI_XFER_READ, 0, 2, other);
	op_submit(&after);
	check_posted_apart(2);
	STUB_SET(frozen, false);
	client_wait_ended(&rig.client, 4);
	CHECK_EQ(page[0], 1);
	CHECK_EQ(other[0], 2);
	rig_stop();
}

int main(void)
{
	return run_on_rig(true);
}
