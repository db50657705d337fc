/* SPDX-License-Identifier: Apache-2.0 */
/* A request's end. */
#ifndef ISWI_STATE_FINISH_H
#define ISWI_STATE_FINISH_H

#include "engine/state/engine.h"

/* Takes one from pending and finishes the request when it was the last. */
void iswi_req_put(struct isw_engine *e, struct iswi_req *req);
void iswi_req_fail(struct iswi_req *req, int error);
void iswi_req_finish_list(struct isw_engine *e, struct iswi_req *list);
/* Ends each with -EIO. */
void iswi_req_fail_list(struct isw_engine *e, struct iswi_req *list);

#endif
