/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A flush must see every write completed before it on the disk. Pages not yet there are counted
 * in one of two epochs. A round of flushes turns the epoch, waits until the old one counts no
 * page, syncs, and answers; flushes that come meanwhile form the next round.
 */
#include <errno.h>

#include "engine/backup/backup.h"
#include "engine/state/finish.h"

static void flush_round(struct iswi_backup *b)
{
	b->flush_now = b->flush_next;
	b->flush_next = NULL;
	b->epoch ^= 1;
	b->flush_state = b->outstanding[b->epoch ^ 1] ? ISWI_FLUSH_DRAIN : ISWI_FLUSH_READY;
	pthread_cond_broadcast(&b->write_cond); /* no page waits for neighbours now */
}

void iswi_flush_less(struct iswi_backup *b, uint8_t epoch)
{
	b->outstanding[epoch]--;
	if (b->flush_state == ISWI_FLUSH_DRAIN && epoch != b->epoch && !b->outstanding[epoch]) {
		b->flush_state = ISWI_FLUSH_READY;
		pthread_cond_signal(&b->write_cond);
	}
}

void iswi_flush(struct isw_engine *e, struct iswi_req *req)
{
	struct iswi_backup *b = e->backup;
	bool at_once = true;

	req->next = NULL;
	pthread_mutex_lock(&b->lock);
	if (b->failed.head != ISWI_NONE) {
		iswi_req_fail(req, -EIO);
	} else if (e->has_backup) {
		at_once = false;
		req->next = b->flush_next;
		b->flush_next = req;
		if (b->flush_state == ISWI_FLUSH_IDLE)
			flush_round(b);
	}
	pthread_mutex_unlock(&b->lock);
	if (at_once)
		iswi_req_finish_list(e, req);
}

struct iswi_req *iswi_flush_give_up(struct iswi_backup *b)
{
	struct iswi_req *list = b->flush_now, **end = &list;

	while (*end)
		end = &(*end)->next;
	*end = b->flush_next;
	b->flush_now = b->flush_next = NULL;
	return list;
}

void iswi_flush_synced(struct isw_engine *e, int error)
{
	struct iswi_backup *b = e->backup;
	struct iswi_req *list;

	if (error)
		iswi_count(&e->count.backup_errors, 1);
	pthread_mutex_lock(&b->lock);
	list = b->flush_now;
	b->flush_now = NULL;
	b->flush_state = ISWI_FLUSH_IDLE;
	if (b->flush_next)
		flush_round(b);
	pthread_mutex_unlock(&b->lock);
	if (error)
		iswi_req_fail_list(e, list);
	else
		iswi_req_finish_list(e, list);
}
