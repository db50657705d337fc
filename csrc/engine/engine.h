/* SPDX-License-Identifier: Apache-2.0 */
/* An engine's making and its take-over, without the threads and the backup's storage. */
#ifndef ISWI_ENGINE_H
#define ISWI_ENGINE_H

#include "engine/state/engine.h"

/* The backup's storage and threads are the caller's to add. */
int iswi_engine_make(const struct isw_engine_config *config, struct isw_engine **engine_out,
		     struct isw_error *error);
/* An arena that is ours and ready becomes this engine's state; see recover.c. */
int iswi_recover(struct isw_engine *e, struct isw_error *error);

#endif
